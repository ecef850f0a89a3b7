"""Integrations with trainers' own libraries."""
