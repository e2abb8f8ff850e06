"""HTTP and gRPC: sockets, bodies, replies, errors."""
