"""Exports: adapters, bases and merged models in the formats that other software reads."""
