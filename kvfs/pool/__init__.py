"""The parts of a pool: pool.toml, devices, the structures on them besides blocks, and their owners."""
