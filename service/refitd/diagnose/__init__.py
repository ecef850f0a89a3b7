"""Diagnosis from outside a running service: `refitd doctor`, `refitd fsck`, and the checks before a start."""
