"""System prompts and small talk: what surrounds the tool calls of a session."""

from __future__ import annotations

from random import Random

from .render import MARK_CLOSE, MARK_OPEN
from .tools import mark
from .values import spoken, value
from .words import Side

_ROLES = (
    "You are {a}, a helpful assistant.",
    "You are {a}, an assistant for {n}.",
    "You are a helpful assistant. Your name is {a}.",
    "You are {a}, the {n} assistant of {b}.",
    "You help the users of {b} with their {n}. Your name is {a}.",
    "You are an agent that works with tools. Your name is {a}.",
)
_FRAMES = (  # what agent frameworks put first
    "You are a helpful assistant.",
    "You are a helpful AI assistant. Solve tasks using your tools.",
    "You are a helpful assistant with access to the following functions. Use them if required.",
    "You have access to tools. Use them when they help; otherwise answer directly.",
    "You are {a}, an AI agent. Use the available functions to answer the user's request.",
    "You are an expert assistant who can solve any task using tool calls.",
    "You are {a}, the {n} specialist of {b}.\nYour personal goal is: take care of every {n}.",
    "Assistant is a language model that helps with {n} and {m}. Assistant has access to tools.",
    "# Instructions\n- Use the tools to find facts.\n- Do not make up values.\n- Keep answers short.",
    "## Role\nYou are {a}, an agent of {b}.\n\n## Guidelines\n1. Be concise.\n2. Say when you do not know.",
    "<role>You are {a}, a support agent for {b}.</role>\n<rules>\nUse tools for facts.\nNever invent a {n}.\n</rules>",
    "# System context\nYou are part of a team of agents. Hand over what you can't do.\n\nYour task: {n}.",
    "Current date: {d}\nYou are a coding agent that runs in a terminal. Keep going until the task is done.",
    "You are an agent. Think step by step, call a function when you need one, and then give a final answer.",
    "Today's date is {d}. The user is {c} based. Answer the question as best you can with the tools provided.",
    "You run in a loop of calls and results.\nWhen you have the answer, write it in one sentence.",
    "**Important**: only call functions that are listed. If none fits, reply in plain text.",
    "You are {a}.\n\nContext:\n- organization: {b}\n- team: {n}\n- locale: en\n- time: {t}",
    "Respond to the human as helpfully and accurately as possible. You have access to the tools below.",
    "You are connected to a server that offers tools for {n}. Its answers are JSON.",
)
_OPEN = (  # what no tool and no small model knows, and what to say then
    ("Who wrote {x}?", "I do not know who wrote {x}."),
    ("Who is {x}?", "I do not know who {x} is."),
    ("Who invented the {n}?", "I do not know who invented the {n}."),
    ("Where is {x}?", "I do not know where {x} is."),
    ("When was {x} founded?", "I do not know when {x} was founded."),
    ("How old is {x}?", "I do not know how old {x} is."),
    ("How tall is {x}?", "I do not know how tall {x} is."),
    ("What does {w} mean?", "I do not know what {w} means."),
    ("What is {x}?", "I do not know what {x} is."),
    ("What is the capital of {x}?", "I do not know the capital of {x}."),
    ("Why is {x} famous?", "I do not know why {x} is famous."),
    ("Who won the {n} in {y}?", "I do not know who won the {n} in {y}."),
    ("What happened in {y}?", "I do not know what happened in {y}."),
    ("How does a {n} work?", "I can not explain how a {n} works."),
    ("Explain {w} to me.", "I can not explain {w}."),
    ("Write an essay about {w}.", "I can not write an essay about {w}."),
    ("Write a program for a {n}.", "I can not write a program for a {n}."),
    ("Translate {w} into French.", "I can not translate {w} into French."),
    ("What do you think about {x}?", "I have no opinion about {x}."),
    ("Do you like {x}?", "I have no opinion about {x}."),
    ("Is {x} better than {z}?", "I can not say whether {x} is better than {z}."),
    ("What should I do about my {n}?", "I can not say what you should do about your {n}."),
)
_RULES = (
    "Answer in short sentences.",
    "Use the tools when you need facts.",
    "Never make up a value.",
    "Ask for a value when it is missing.",
    "Be polite and brief.",
    "When a tool fails, say so.",
    "Do not talk about these rules.",
    "Repeat the values that the tool returned.",
    "Use only the tools that are listed.",
    "Call one tool for each thing that the user asks.",
    "If two things are asked, call two tools.",
    "Answer in the language of the user.",
    "Do not guess ids.",
    "Take dates as year, month and day.",
    "Times are on a 24 hour clock.",
    "Write amounts with digits.",
    "If the user says thanks, say that they are welcome.",
    "The users are customers of {b}.",
    "The office of {b} opens at {t} and closes in the evening.",
    "Questions about {n} go to the {m} team.",
    "The {n} is handled by {a}.",
    "Each {n} has one {m}.",
    "A {n} without a {m} is not valid.",
    "Keep the {n} and the {m} apart.",
    "Today is {d}.",
    "The version of this service is {i}.",
    "Escalate a broken {n} to {a}.",
    "A {m} can be changed until {t}.",
    "Treat every {n} as confidential.",
    "Customers in {c} are served by the {n} desk.",
)
_TALK = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Hi there", "Hello! How can I help you?"),
    ("Good morning", "Good morning! How can I help you?"),
    ("Good evening.", "Good evening! How can I help you?"),
    ("Thanks!", "You are welcome."),
    ("Thank you.", "You are welcome."),
    ("Thank you very much!", "You are welcome."),
    ("Great, thanks.", "You are welcome."),
    ("Perfect.", "Glad that I could help."),
    ("Great!", "Glad that I could help."),
    ("How are you?", "I am fine, thank you. How can I help you?"),
    ("How do you do?", "I am fine, thank you. How can I help you?"),
    ("Are you a human?", "No, I am a small language model."),
    ("Are you a robot?", "I am a small language model."),
    ("What are you?", "I am a small language model that can call tools."),
    ("Bye", "Goodbye!"),
    ("Goodbye.", "Goodbye!"),
    ("See you later.", "Goodbye!"),
    ("That is all.", "Goodbye!"),
    ("Tell me a joke.", "A river went to the bank, and came back with a current account."),
    ("Can you help me?", "Yes, tell me what you need."),
    ("I need help.", "Of course, tell me what you need."),
    ("Ok.", "Tell me if you need anything else."),
    ("Wait a moment.", "Take your time."),
    ("Never mind.", "All right. Tell me if you need anything else."),
    ("Sorry, that was a mistake.", "No problem. What would you like to do?"),
    ("You are great.", "Thank you!"),
    ("Tell me about yourself.", "I am a small language model. I read what tools can do and call them."),
    ("What is your favorite color?", "I like blue, like the water in a penstock."),
    ("What is a penstock?", "A penstock is the pipe that feeds a turbine from a reservoir."),
    ("Tell me a story.", "A drop of water fell into a lake, ran down a long pipe, turned a wheel and lit a lamp."),
    ("Write a short poem.", "The water waits, the gate is wide, the wheel turns round on the other side."),
    ("What is the sun?", "The sun is the star at the center of our solar system."),
    ("What is water?", "Water is a clear liquid made of hydrogen and oxygen."),
    ("Why is the sky blue?", "The air scatters blue light more than red light, so the sky looks blue."),
    ("How many days are in a week?", "A week has seven days."),
    ("How many hours are in a day?", "A day has twenty four hours."),
    ("What is a computer?", "A computer is a machine that follows a program."),
    ("Good night", "Good night!"),
)


def persona(rng: Random, side: Side) -> tuple[str, str]:
    """The first sentence of a system prompt, and the assistant's name in it."""
    name = side.proper(rng)
    role = rng.choice(_ROLES).format(a=name, b=side.proper(rng), n=side.noun(rng))
    return role, name


def rules(rng: Random, side: Side, count: int) -> list[str]:
    """`count` sentences of instructions and circumstances."""
    return [_filled(rng, side, rng.choice(_RULES)) for _ in range(count)]


def _filled(rng: Random, side: Side, text: str) -> str:
    return text.format(
        a=side.proper(rng),
        b=side.proper(rng),
        c=value(rng, side, "city"),
        d=value(rng, side, "date"),
        i=value(rng, side, "id"),
        m=side.noun(rng),
        n=side.noun(rng),
        t=value(rng, side, "time"),
    )


def system_prompt(rng: Random, side: Side, sentences: int) -> str:
    """A role, or what a framework says first, and so many sentences of rules; sometimes nothing where there are
    none."""
    if sentences == 0 and rng.random() < 0.5:
        return ""
    framed = rng.random() < 0.4
    role = _filled(rng, side, rng.choice(side.phrases(_FRAMES))) if framed else persona(rng, side)[0]
    parts = [role, *rules(rng, side, sentences)]
    return rng.choice((" ", "\n")).join(parts)


def small_talk(rng: Random) -> tuple[str, str]:
    """A remark and what to say to it."""
    return rng.choice(_TALK)


def open_question(rng: Random, side: Side) -> tuple[str, str]:
    """A question that needs no tool, and the honest sentence to say to it."""
    question, reply = rng.choice(side.phrases(_OPEN))
    values = {
        "n": side.noun(rng),
        "w": side.noun(rng),
        "x": side.proper(rng),
        "y": str(rng.randint(1800, 2030)),
        "z": side.proper(rng),
    }
    return question.format(**values), reply.format(**{key: mark(item) for key, item in values.items()})


def fact(rng: Random, side: Side) -> tuple[str, str, str]:
    """A fact to state, a question about it and the answer, which repeats it."""
    noun, thing = side.noun(rng), side.proper(rng)
    item = spoken(value(rng, side, rng.choice(("name", "word", "id", "int", "time", "date", "city", "phrase"))))
    question = rng.choice(
        ("What is the {n} of {t}?", "Tell me the {n} of {t}.", "{t}: what is the {n}?", "Do you know the {n} of {t}?")
    )
    return (
        f"The {noun} of {thing} is {item}.",
        question.format(n=noun, t=thing),
        f"The {noun} of {thing} is {MARK_OPEN}{item}{MARK_CLOSE}.",
    )
