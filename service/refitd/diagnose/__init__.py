"""Diagnosis from outside a running service: `refitd doctor`, and the checks before a start."""
