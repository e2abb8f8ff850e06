"""Code below torch, each piece with a twin in torch that says what it means."""
