"""The operator's console: the files of its page, which `door/console.py` serves."""
