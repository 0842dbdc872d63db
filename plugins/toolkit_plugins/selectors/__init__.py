"""The built-in selectors, one file each."""

COMPONENTS = []
