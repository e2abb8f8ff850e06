"""What guards cost, and what tests notice: a module or a package for each part of it."""
