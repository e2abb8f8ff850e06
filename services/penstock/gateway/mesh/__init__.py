"""The router and the workers as the gateway sees them; protobuf stays in here."""
