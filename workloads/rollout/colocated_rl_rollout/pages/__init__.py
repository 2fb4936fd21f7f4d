"""This room serves batches to agents, and samples and figures to people. In the store it changes nothing but how many
ranks a batch is dealt to.
"""
