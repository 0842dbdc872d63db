"""A control as one file: locked or not, certified, verified, cited, ranked on a board."""
