"""What is true now: records, the store with one writer, its observers, and the journal."""
