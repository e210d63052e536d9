"""Which block is known, and where its copies lie: typed rows, no objects per block."""
