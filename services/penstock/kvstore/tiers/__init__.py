"""The places where blocks of this store are, and what moves them from one to another."""
