"""Grammars that an answer keeps to, token by token: what may come next, what must, and when the text may end.

llguidance does the parsing; a grammar travels as text in its own JSON form. The state of a text is a function of the
grammar and of the text's tokens alone, so it is never sent: whoever has both makes it anew.
"""
