"""Renderings that go on where an earlier one of the same conversation was, with the same text as a whole one.

A chat template is a program: what it writes for a message may depend on any other. So nothing is assumed. While it
runs, the conversation that it sees takes note of how far it looks (`watched`), and its loops over messages pass by
`run` before each message. There a rendering can be resumed: what was written before is a function of

- the messages that the loop's earlier rounds have looked at, as long as they asked for none that did not exist;
- the template's variables and namespaces where the loop began, and the text up to there;
- what else the template is given: the tools, whether it opens an answer, and the client's variables.

The next rendering runs all of the template but these rounds. Where the loop begins, it compares the second and the
third by a digest; whoever asks has compared the messages. The namespaces, which are all that lives from one round to
the next, get the values that they had. Where something cannot be watched, is not at hand or differs, all messages are
rendered.
"""
