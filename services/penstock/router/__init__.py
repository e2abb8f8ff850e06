"""Decides where work goes: which workers, and which stored prefix. It is never on the token path."""
