"""Pure decisions: no I/O, no clock of their own."""
