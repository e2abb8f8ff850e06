"""The holders of the slots of a tier. Pure: no clock, no socket, no bytes."""
