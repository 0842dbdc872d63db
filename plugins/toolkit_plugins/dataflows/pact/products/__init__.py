"""Products of NVFP4 values with a frozen NVFP4 weight, one way of computing them a module."""
