// Finds what followed the last tokens before, and guesses from it what follows them now. What the functions return is
// defined by engine/speculation/lookup/plain.py, which does the same in numpy; the numbers here are those of
// chances.py.
#include "layout.h"

#include <algorithm>
#include <vector>

namespace penstock {

namespace {

constexpr int kOrders[] = {1, 2, 4, 8, 16};  // lengths of the grams that are indexed
constexpr int kCount = 5;
constexpr int kLongest = 16;
constexpr int kPlaces = 8;     // the latest places of a gram, which have votes
constexpr int kMatched = 32;   // matches of more tokens count as matches of so many
constexpr int kMost = 64;      // tokens of a guess
constexpr int kVisits = 256;   // places that are looked at for one gram
constexpr int kOne = 1 << 16;  // a chance of 1
constexpr int kLeast = kOne / 10;
constexpr int32_t kBreak = -1;  // stands between texts
constexpr int64_t kFirstRoom = 1 << 9;
constexpr uint32_t kMostBuckets = 1 << 15;
constexpr int64_t kLastPlace = int64_t(1) << 31;
constexpr uint64_t kBase = 0x9e3779b97f4a7c15ull;  // odd, of a polynomial modulo 2^64

constexpr uint64_t power(int exponent) { return exponent ? power(exponent - 1) * kBase : 1; }
constexpr uint64_t kLeaves[kCount] = {power(1), power(2), power(4), power(8), power(16)};  // of what leaves a gram

struct Link {
  uint32_t before[kCount];  // for each order, 1 + the last place before with a gram in the same bucket; 0: none
};

// A search for the latest places of a gram.
struct Search {
  const Corpus *corpus;
  int which, found = 0, visits = 0;
  uint32_t next = 0;  // 1 + the place to look at; 0: there is none
  int64_t places[kPlaces] = {};
};

}  // namespace

// The last `limit` tokens of texts. A place is the number of a token; the gram of a place is what stands before it.
// Places whose grams fall into one bucket are linked, the latest first, so that both to append and to find takes a time
// that does not depend on how long the texts are. Buckets and memory grow with the texts.
struct Corpus {
  explicit Corpus(int64_t limit) : limit(limit) { clear(); }

  void append(const int32_t *added, int64_t count) {
    if (end + count >= kLastPlace) clear();
    make_room(std::min(limit, end + count));
    for (int64_t i = 0; i < count; ++i) append(added[i]);
  }

  int32_t at(int64_t place) const { return tokens[place & mask]; }

  // Copies the last tokens, at most `most` and none before a break, in front of `behind`; returns how many.
  int last(int most, int32_t *behind) const {
    int count = 0;
    for (; count < most && count < run; ++count) behind[-1 - count] = at(end - 1 - count);
    return count;
  }

  const uint32_t *latest(int which, uint64_t hash) const { return &buckets[which][bucket(hash)]; }

  // Looks at the next place; false when there is none. What is looked at then is on its way to the processor meanwhile,
  // so several searches by turns take little more time than one.
  bool look(Search &search, const int32_t *context) const {
    const int order = kOrders[search.which];
    const int64_t place = int64_t(search.next) - 1;
    if (!search.next || search.found == kPlaces || search.visits++ == kVisits || place - order < end - limit)
      return false;
    search.next = links[place & mask].before[search.which];
    prefetch(search.next);
    if (same(order, place, context)) search.places[search.found++] = place;
    return true;
  }

  void prefetch(uint32_t next) const {
    if (!next) return;
    __builtin_prefetch(&links[(next - 1) & mask]);
    __builtin_prefetch(&tokens[(next - 2) & mask]);
  }

  const int64_t limit;
  int64_t end = 0;  // the place of the next token

 private:
  void clear() {
    end = run = 0, mask = kFirstRoom - 1, bits = 9;
    tokens.assign(kFirstRoom, 0), links.assign(kFirstRoom, Link{});
    for (auto &each : buckets) each.assign(size_t(1) << bits, 0);
    std::fill(hashes, hashes + kCount, 0);
  }

  void append(int32_t token) {
    if (token == kBreak) {
      run = 0;
      std::fill(hashes, hashes + kCount, 0);
    } else {
      link();
      roll(token);
      ++run;
    }
    tokens[end++ & mask] = token;
  }

  // Links the place `end` to those before it.
  void link() {
    Link &mine = links[end & mask];
    for (int which = 0; which < kCount && run >= kOrders[which]; ++which) {
      uint32_t &latest = buckets[which][bucket(hashes[which])];
      mine.before[which] = latest;
      latest = uint32_t(end + 1);
    }
  }

  void roll(int32_t token) {
    for (int which = 0; which < kCount; ++which) {
      hashes[which] = hashes[which] * kBase + uint32_t(token) + 1;
      if (run >= kOrders[which]) hashes[which] -= (uint64_t(at(end - kOrders[which])) + 1) * kLeaves[which];
    }
  }

  // Until the memory has room for `limit` tokens no place is used twice, so what was appended stays where it is.
  void make_room(int64_t count) {
    int64_t room = mask + 1;
    while (room < count) room *= 2;
    if (room == mask + 1) return;
    tokens.resize(room), links.resize(room);
    mask = room - 1;
    const uint32_t wanted = uint32_t(std::min<int64_t>(room, kMostBuckets));
    if (wanted > buckets[0].size()) spread(wanted);
  }

  // Links all places again, with more buckets.
  void spread(uint32_t wanted) {
    for (auto &each : buckets) each.assign(wanted, 0);
    while (uint32_t(1) << bits < wanted) ++bits;
    const int64_t all = end;
    std::fill(hashes, hashes + kCount, 0);
    for (end = run = 0; end < all;) append(at(end));
  }

  uint32_t bucket(uint64_t hash) const { return uint32_t(hash * 0xd6e8feb86659fd93ull >> (64 - bits)); }

  bool same(int order, int64_t place, const int32_t *context) const {
    for (int back = 1; back <= order; ++back)
      if (at(place - back) != context[-back]) return false;
    return true;
  }

  int64_t run, mask;  // tokens since the last break; places of memory - 1, a power of two - 1
  int bits;           // of the number of a bucket
  std::vector<int32_t> tokens;
  std::vector<Link> links;
  std::vector<uint32_t> buckets[kCount];  // 1 + the latest place; 0: none
  uint64_t hashes[kCount];                // of the last tokens
};

namespace {

struct Path {
  int64_t worth = 0;  // expected tokens that are right
  int length = 0;
  int32_t tokens[kMost], chances[kMost];
};

struct Votes {
  int32_t token;
  int count = 0, all = 0;
};

// What follows most of the places; of equals what follows the latest.
Votes vote(const Corpus &corpus, const int64_t *places, int count, int depth) {
  int32_t tokens[kPlaces];
  int votes[kPlaces], kinds = 0, all = 0;
  for (int i = 0; i < count; ++i) {
    if (places[i] + depth >= corpus.end) continue;
    const int32_t token = corpus.at(places[i] + depth);
    if (token == kBreak) continue;
    int kind = 0;
    while (kind < kinds && tokens[kind] != token) ++kind;
    if (kind == kinds) tokens[kinds] = token, votes[kinds++] = 0;
    ++votes[kind], ++all;
  }
  if (!all) return {};
  const int best = int(std::max_element(votes, votes + kinds) - votes);
  return {tokens[best], votes[best], all};
}

// Follows the most frequent continuation of the places as long as its chance, all before it included, is worth it.
void follow(Search &search, int most, const int32_t *chances, Path &path) {
  const Corpus &corpus = *search.corpus;
  int64_t whole = kOne, *const places = search.places;
  int count = search.found;
  for (int depth = 0; depth < most; ++depth) {
    const Votes votes = vote(corpus, places, count, depth);
    if (!votes.all) return;
    const int matched = std::min(kOrders[search.which] + depth, kMatched);
    const int32_t chance = chances[(matched * (kPlaces + 1) + votes.all) * (kPlaces + 1) + votes.count];
    whole = whole * chance >> 16;
    if (whole < kLeast) return;
    path.worth += whole;
    path.tokens[depth] = votes.token, path.chances[depth] = chance, path.length = depth + 1;
    const auto other = [&](int64_t place) {
      return place + depth >= corpus.end || corpus.at(place + depth) != votes.token;
    };
    count = int(std::remove_if(places, places + count, other) - places);
  }
}

}  // namespace

extern "C" {

// A corpus of the last `limit` tokens, a power of two from 512 on.
Corpus *penstock_corpus_open(int64_t limit) { return new Corpus(limit); }

void penstock_corpus_close(Corpus *corpus) { delete corpus; }

// Appends tokens, and -1 between texts.
void penstock_corpus_append(Corpus *corpus, const int32_t *tokens, int64_t count) { corpus->append(tokens, count); }

// Guesses what comes behind the last text of `own` and then `after`: at most `most` tokens, each with its chance.
// `own` and the others that are not null say what followed before. `chances` is the table of chances.py.
int32_t penstock_guess(const Corpus *own, const Corpus *second, const Corpus *third, const int32_t *after,
                       int32_t added, const int32_t *chances, int32_t most, int32_t *tokens, double *found) {
  int32_t room[2 * kLongest], *const context = room + 2 * kLongest;
  const int forced = std::min(added, kLongest);
  std::copy_n(after + (added - forced), forced, context - forced);
  const int known = forced + own->last(kLongest - forced, context - forced);
  uint64_t hashes[kCount], hash = 0, factor = 1;
  for (int back = 1, which = 0; back <= known; ++back, factor *= kBase) {
    hash += (uint64_t(uint32_t(context[-back])) + 1) * factor;
    if (back == kOrders[which]) hashes[which++] = hash;
  }
  Search searches[3 * kCount], *last = searches;
  for (const Corpus *corpus : {own, second, third})
    for (int which = kCount - 1; corpus && which >= 0; --which)
      if (kOrders[which] <= known) {
        __builtin_prefetch(corpus->latest(which, hashes[which]));
        *last++ = {corpus, which};
      }
  for (Search *each = searches; each < last; ++each) {
    each->next = *each->corpus->latest(each->which, hashes[each->which]);
    each->corpus->prefetch(each->next);
  }
  for (bool more = true; more;) {
    more = false;
    for (Search *each = searches; each < last; ++each) more |= each->corpus->look(*each, context);
  }
  Path best;
  for (Search *each = searches; each < last; ++each) {
    Path path;
    follow(*each, std::min(most, kMost), chances, path);
    if (path.worth > best.worth) best = path;
  }
  std::copy_n(best.tokens, best.length, tokens);
  for (int i = 0; i < best.length; ++i) found[i] = double(best.chances[i]) / kOne;
  return best.length;
}
}

}  // namespace penstock
