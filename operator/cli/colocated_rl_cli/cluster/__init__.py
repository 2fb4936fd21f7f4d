"""Call the API server, kubectl and the members' pages; no other code here does."""
