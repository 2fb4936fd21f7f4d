"""What was seen of a job: its objects, its logs' records, and what they prove. Pure."""
