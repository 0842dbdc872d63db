"""Initialization studies: starts of base and adapters compared, layer by layer and by a model's losses."""
