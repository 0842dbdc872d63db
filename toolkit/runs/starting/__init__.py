"""Starts of a plan's layers: computed from the weights alone, or block by block over calibration text."""
