"""Who starts and ends workers for `penstock scale`."""
