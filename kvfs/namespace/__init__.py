"""Files and directories, and the blocks they are. Knows neither FUSE nor devices."""
