"""Stage 1: layers, checkpoints read shard by shard, and the profile. No model is built."""
