"""A group of services with one journal in PostgreSQL, of which one leads."""
