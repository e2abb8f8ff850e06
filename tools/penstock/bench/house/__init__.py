"""`make house`: figures of the source itself: sizes, signatures, docstrings, floors and arrows."""
