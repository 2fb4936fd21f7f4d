"""The only code that asks the API server, kubectl and the members' pages."""
