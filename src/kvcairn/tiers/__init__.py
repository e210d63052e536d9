"""Storage levels below memory: one file or folder each, all behind one contract."""
