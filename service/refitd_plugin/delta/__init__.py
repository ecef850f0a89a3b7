"""Deltas: looked at and read (`changes`), laid out for a model (`layout`), written into what is served (`in_place`)."""
