"""How an engine talks to the store."""
