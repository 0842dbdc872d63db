"""The plain data between the stages: one file format a module, and how files are read and written.

Every record is a pydantic model that refuses unknown keys, carries a schema version, and goes to JSON and
back unchanged. Its JSON Schema is published in `toolkit/schemas/`. Nothing here imports torch.
"""
