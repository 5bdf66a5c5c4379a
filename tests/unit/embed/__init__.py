"""Which texts are embedded, how often, and with what."""
