"""Who holds which slot of a tier. Pure: no clock, no socket, no bytes."""
