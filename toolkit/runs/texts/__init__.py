"""Texts as windows of tokens, and what a model scores on them."""
