"""Webhooks: an operator's URLs are told of what matters, signed, until they have taken it or it is given up."""
