"""How weights get from the trainer's memory to an engine without a file."""
