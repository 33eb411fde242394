"""What a pool is made of: pool.toml, devices, what is written on them besides blocks, and who owns them."""
