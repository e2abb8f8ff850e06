"""What clients see when a service dies: `penstock bench failover`."""
