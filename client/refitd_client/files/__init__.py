"""Files: opened without following links, synced, locked and mapped."""
