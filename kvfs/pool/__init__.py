"""The parts of a pool: pool.toml, devices, the structures on them except blocks, and their owners."""
