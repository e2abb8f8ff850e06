"""What guards cost: a module for each part of it."""
