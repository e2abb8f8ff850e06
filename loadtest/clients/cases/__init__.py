"""Cases, a file for each client: programs that `loadtest.clients.run` starts in the environments of the clients."""
