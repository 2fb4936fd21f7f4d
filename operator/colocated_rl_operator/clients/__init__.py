"""The only code that speaks to the API server and to members. Translates their errors, decides nothing."""
