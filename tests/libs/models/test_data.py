"""The generator: seeded, split for good, and weighted where the model must choose."""

from __future__ import annotations

import json
import re
from itertools import combinations
from random import Random

import pytest

from penstock.models import embedded
from penstock.models.agent import agent
from penstock.models.ahead import SharedStream
from penstock.models.data import BatchStream, DocumentStream, Emphasis, Stage, pack, weigh
from penstock.models.export import load
from penstock.models.invented import alike_tools
from penstock.models.phrasing import addressed, joint, varied
from penstock.models.render import DECISION, MARK_CLOSE, MARK_OPEN
from penstock.models.results import failed, shown
from penstock.models.sessions import MAKERS, make
from penstock.models.text import Library
from penstock.models.tokenizer import load as load_tokenizer
from penstock.models.words import ACTION_VERBS, CITIES, FIRST_NAMES, QUERY_VERBS, Side, held_out

TRAIN, HELD = Side(False), Side(True)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(embedded("penstock-mini"))


@pytest.mark.parametrize("kind", list(MAKERS))
def test_a_document_is_a_function_of_its_seed(kind):
    one, same, other = (make(kind, Random(s), TRAIN) for s in (3, 3, 4))
    assert one == same
    assert one.text != other.text
    assert MARK_OPEN not in one.text and MARK_CLOSE not in one.text
    assert any(weight > 1 for *_, weight in one.ranges) or kind in ("repeat", "chat")


def test_the_sides_share_no_word_or_phrasing():
    train, held = TRAIN, HELD
    assert not set(train.nouns) & set(held.nouns) and not set(train.adjectives) & set(held.adjectives)
    assert held.nouns and held.adjectives
    assert not set(train.lexicon) & set(held.lexicon)
    rng = Random(1)
    assert all(held_out(held.pseudo(rng)) and not held_out(train.pseudo(rng)) for _ in range(200))
    phrases = [str(i) for i in range(10)]
    assert sorted([*train.phrases(phrases), *held.phrases(phrases)], key=int) == phrases


def test_names_and_values_of_evaluation_are_never_seen_in_training():
    """Made-up tools of evaluation carry only held-out words in their names."""
    verbs = {*QUERY_VERBS, *ACTION_VERBS}
    for i in range(30):
        text = agent(Random(i), HELD, 1, 2, 2, everyday=0.0).text
        for name in re.findall(r'^\{"name": "([a-z]+)_([a-z]+)", "arguments": \{"\2', text, re.MULTILINE):
            assert all(held_out(word) for word in name if word not in verbs)


@pytest.mark.parametrize("seed", range(20))
def test_words_of_names_and_keys_are_foretold_by_descriptions_or_names(seed, tokenizer):
    doc = make("L3", Random(seed), TRAIN)
    assert doc.foretold
    for begin, end in doc.foretold:
        line = doc.text.rfind('{"name": ', 0, begin)
        before = doc.text[doc.text.rfind("}\n", 0, line) + 1 : begin]
        assert doc.text[begin:end].lower() in before.lower()
    plain, told = (weigh(tokenizer, doc, 4096, Emphasis(foretold=share)) for share in (0.0, 0.5))
    more = [new for old, new in zip(plain.weights, told.weights, strict=True) if old != new]
    assert more and set(more) == {0.5}


def test_plain_text_may_count_less(tokenizer):
    doc = Library(False).document(Random(1))
    full, tenth = (weigh(tokenizer, doc, 4096, Emphasis(text=share)).weights for share in (1.0, 0.1))
    assert tenth == pytest.approx([weight / 10 for weight in full]) and any(full)
    other = make("L1", Random(1), TRAIN)
    assert weigh(tokenizer, other, 4096, Emphasis(text=0.1)) == weigh(tokenizer, other, 4096)


def test_tools_that_are_alike_share_words_and_differ():
    for seed in range(20):
        tools = alike_tools(Random(seed), TRAIN, 2, 6)
        names = [tool.spec["function"]["name"] for tool in tools]
        assert len(set(names)) == len({tool.subject for tool in tools}) == 6
        words = [{*re.findall(r"[a-z]{2,}", tool.subject)} - {"of"} for tool in tools]
        assert len(set[str]().union(*words)) < sum(map(len, words)), "some word is in several"
        assert all(one != other for one, other in combinations(words, 2)), "and no two have the same"


def test_plain_text_is_split_too():
    train, held = Library(False), Library(True)
    assert held.long and not set(train.long) & set(held.long) and not set(train.short) & set(held.short)


def test_ordinary_names_are_the_only_shared_vocabulary():
    assert len(set(CITIES)) == len(CITIES) and len(set(FIRST_NAMES)) == len(FIRST_NAMES)


def test_calls_in_sessions_fit_their_tools():
    for i in range(30):
        text = make("L3", Random(i), TRAIN).text
        offered = set(re.findall(r'^\{"name": "([^"]+)"', text.partition("<|im_end|>")[0], re.MULTILINE))
        for body in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text):
            assert json.loads(body)["name"] in offered


@pytest.mark.parametrize("kind", ["names", "dense2", "errands"])
def test_dense_sessions_choose_among_the_tools_offered_and_use_most_of_them(kind):
    offers = uses = 0
    for i in range(20):
        doc = make(kind, Random(i), TRAIN)
        offered = set(re.findall(r'^\{"name": "([^"]+)"', doc.text.partition("<|im_end|>")[0], re.MULTILINE))
        called = {doc.text[a:b] for a, b, label in doc.labels if label == "name"}
        assert called <= offered
        offers, uses = offers + len(offered), uses + len(called)
    assert uses > 0.75 * offers


def test_where_a_key_or_value_of_json_ends_is_a_decision(tokenizer):
    doc = make("jsons", Random(3), TRAIN)
    sample = weigh(tokenizer, doc, 4096)
    begin = next(a for a, _, label in doc.labels if label == "json")
    end = doc.text.index("}", begin)
    marks = [
        (doc.text[start], weight)
        for start, weight in zip(sample.starts, sample.weights, strict=True)
        if begin <= start <= end
    ]
    assert all(weight == DECISION for character, weight in marks if character in '{",}')


@pytest.mark.parametrize("kind", ["json", "jsons"])
def test_json_answers_are_json(kind):
    for i in range(30):
        doc = make(kind, Random(i), HELD)
        answers = [json.loads(doc.text[a:b]) for a, b, label in doc.labels if label == "json"]
        assert answers and all(isinstance(a, dict) for a in answers)


def test_decisions_weigh_more_than_copies_and_prompts_nothing(tokenizer):
    doc = make("L3", Random(5), TRAIN)
    sample = weigh(tokenizer, doc, 4096)
    heavy = {
        tokenizer.decode([i], skip_special_tokens=False)
        for i, w in zip(sample.ids, sample.weights, strict=True)
        if w > 1
    }
    assert "<tool_call>" in heavy and any(t.endswith("}}") for t in heavy)
    first = sample.weights.index(next(w for w in sample.weights if w))
    assert tokenizer.decode(sample.ids[:first], skip_special_tokens=False).endswith("<|im_start|>assistant\n")


def test_results_come_in_the_shapes_that_clients_send():
    """Whatever the shape, each value stands in it as an answer says it."""
    result = {"temperature": -7, "city_name": "Århus", "open": True, "load": 0.5}
    texts = [shown(Random(i), TRAIN, result) for i in range(400)]
    for text in texts:
        assert all(each in text for each in ("-7", "Århus", "true", "0.5"))

    def parsed(text):
        try:
            return json.loads(text)
        except ValueError:
            return None

    found = [(text, parsed(text)) for text in texts]
    plain = [text for text, content in found if content is None]
    assert any("\n" in text for text in plain) and any("city name is Århus" in text for text in plain)
    objects = [(text, content) for text, content in found if content is not None]
    assert ({json.dumps(result, ensure_ascii=False)} <= {*texts}) and any('\n  "' in text for text in texts)
    assert json.dumps(result, ensure_ascii=False, separators=(",", ":")) in texts
    assert any(isinstance(content, list) for _, content in objects)
    assert any(isinstance(content, dict) and "data" in content for _, content in objects)
    assert any(isinstance(content, dict) and len(content) > 10 for _, content in objects)
    assert {shown(Random(i), TRAIN, {"size": 4}) for i in range(200)} >= {"4", "[4]", '{"size": 4}', '{"size":4}'}


def test_errors_come_in_the_shapes_that_tools_report():
    texts = {failed(Random(i), "busy") for i in range(300)}
    assert all("busy" in text for text in texts)
    assert {'{"error": "busy"}', '{"error":"busy"}', "Error: busy"} <= texts and any('"code"' in t for t in texts)


def test_calls_that_a_client_wrote_its_own_way_teach_nothing():
    told = 0
    for i in range(150):
        doc = make("L3", Random(i), TRAIN)
        learned = {a for a, b, label in doc.labels if label == "call"}
        for call in re.finditer(r'<tool_call>\n{"name": "[^"]+", "arguments": (.*?)}\n</tool_call>', doc.text, re.S):
            inside = [weight for a, b, weight in doc.ranges if a < call.end() and b > call.start()]
            ours = json.dumps(json.loads(call[1]), ensure_ascii=False)
            if any(start in learned for start in (call.start(), call.start() - 1)):
                assert call[1] == ours and inside
            else:
                told += call[1] != ours
                assert not inside
    assert told > 20


def test_questions_that_need_no_tool_get_one_plain_sentence():
    questions = 0
    for kind in ("L3", "chat"):
        for i in range(60):
            doc = make(kind, Random(i), HELD)
            for a, b, label in doc.labels:
                text = doc.text[a:b]
                if label == "chat" and text.startswith(("I do not know", "I can not", "I have no opinion")):
                    questions += 1
                    assert text.count(".") == 1 and text.endswith(".") and not set(text) & set('<>{}[]"*#')
    assert questions > 20


FORM = "Book a table at {restaurant} for {people} people on {date} at {time}."


def test_training_reads_phrasings_in_more_ways_than_are_written_down():
    forms = [varied(Random(i), TRAIN, FORM) for i in range(400)]
    assert 200 < sum(form == FORM for form in forms) < 300 and len({*forms}) > 80
    for form in forms:
        assert sorted(re.findall(r"{\w+}", form)) == sorted(re.findall(r"{\w+}", FORM)), form
    assert any("{date} at {time}" not in form and "at {time}" in form for form in forms), "parts change places"
    joints = {joint(Random(i), TRAIN, " with {e}") for i in range(300)}
    assert len(joints) > 40 and all(each.count("{e}") == 1 for each in joints)
    said = {addressed(Random(i), TRAIN, "Pay the invoice 7.") for i in range(300)}
    assert len(said) > 20 and all("ay the invoice 7" in text for text in said)


def test_evaluation_keeps_to_the_phrasings_that_are_written_down():
    for i in range(100):
        rng = Random(i)
        assert varied(rng, HELD, FORM) == FORM and joint(rng, HELD, " with {e}") == " with {e}"
        assert addressed(rng, HELD, "Pay it.") == "Pay it." and rng.getstate() == Random(i).getstate()


def test_system_prompts_of_frameworks_are_among_them():
    prompts = [make("L3", Random(i), TRAIN).text.partition("# Tools")[0] for i in range(200)]
    assert any("# Instructions" in text for text in prompts) and any("<rules>" in text for text in prompts)
    assert not any("{" in text for text in prompts)


STAGES = (Stage(1.0, {"L1": 1.0, "text": 1.0}, 512),)


def test_a_stream_goes_on_with_the_next_document(tokenizer):
    whole, resumed = (DocumentStream(tokenizer, STAGES, 7) for _ in range(2))
    first = whole.take(0.0, 1024)
    total = sum(len(sample.ids) for sample in first)
    assert total >= 1024 > total - len(first[-1].ids) and all(len(sample.ids) <= 512 for sample in first)
    resumed.drawn = whole.drawn
    assert resumed.take(0.5, 600) == whole.take(0.5, 600) != first


def test_processes_draw_the_same_documents_in_the_same_order(tokenizer):
    stages = (Stage(0.5, {"L1": 1.0, "text": 1.0}, 512), Stage(1.0, {"lookup": 1.0}, 256))
    alone, shared = DocumentStream(tokenizer, stages, 7), SharedStream(2, tokenizer, stages, 7)

    def both(progress: float) -> None:
        taken = shared.take(progress, 20_000)
        wanted = alone.take(progress, 20_000)
        assert [list(sample.ids) for sample in taken] == [list(sample.ids) for sample in wanted]
        assert [list(sample.weights) for sample in taken] == [list(sample.weights) for sample in wanted]
        assert shared.drawn == alone.drawn

    try:
        both(0.1), both(0.4), both(0.6)
        shared.drawn = alone.drawn = 3  # as after a restart
        both(0.2)
    finally:
        shared.close()


def test_where_names_begin_alike_their_difference_can_count(tokenizer):
    doc = make("alike3", Random(2), TRAIN)
    assert doc.differing
    plain, told = (weigh(tokenizer, doc, 4096, Emphasis(differing=n)) for n in (0.0, 5.0))
    heavy = [start for start, weight in zip(told.starts, told.weights, strict=True) if weight == 5.0]
    assert len(heavy) == len({begin for begin, _ in doc.differing})
    others = {tool["function"]["name"] for tool in doc.tools}
    for begin, _ in doc.differing:
        name = max(doc.text.rfind('"', 0, begin), doc.text.rfind("\n", 0, begin)) + 1
        known = doc.text[name:begin]
        assert known and any(other.startswith(known) and other[len(known) :][:1] != doc.text[begin] for other in others)
    assert [w for w in plain.weights if w] and 5.0 not in plain.weights


def test_a_description_can_tell_in_other_words_than_the_name(tokenizer):
    texts = [make("told2", Random(i), TRAIN).text for i in range(60)]
    told = "\n".join(texts)
    assert "erase" in told.lower() and '"name": "delete' in told.lower().replace("_", "")
    assert not any("erase" in make("dense2", Random(i), TRAIN).text.lower() for i in range(60))


def test_packed_and_padded_rows_hold_the_same_documents(tokenizer):
    samples = DocumentStream(tokenizer, STAGES, 7).take(0.0, 4000)
    packed, position = pack(samples), 0
    for sample in samples:
        ids = packed.ids[position : position + len(sample.ids)]
        assert ids.tolist() == list(sample.ids)
        inside = (packed.keep >= position) & (packed.keep < position + len(ids))
        at = packed.keep[inside] - position + 1
        assert at.tolist() == [i for i, weight in enumerate(sample.weights) if weight and i]
        assert (ids[at] == packed.targets[inside]).all()
        assert packed.weights[inside].tolist() == [sample.weights[i] for i in at]
        position += len(ids)
    assert packed.tokens == position and packed.spans.lengths == [len(sample.ids) for sample in samples]
    padded = BatchStream(DocumentStream(tokenizer, STAGES, 7), 1024)
    batches = [padded.next(0.0)]
    while padded.ready:
        batches.append(padded.next(0.0))
    for batch in batches:
        assert batch.tokens <= batch.ids.numel() <= 1024
        assert (batch.ids.flatten()[batch.keep + 1] == batch.targets).all()
    again = DocumentStream(tokenizer, STAGES, 7).take(0.0, 12 * 1024)
    assert sum(len(batch.ids) for batch in batches) == len(again)
    weights = [float(batch.weights.sum()) for batch in batches]
    assert sum(weights) == pytest.approx(float(pack(again).weights.sum()))


def test_loading_reads_what_was_exported():
    net, _ = load(embedded("penstock-mini-draft"))
    assert net.shape.width == 128 and net.shape.context >= 4096
