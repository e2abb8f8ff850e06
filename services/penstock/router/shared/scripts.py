"""What is done in Redis in one piece. Each script touches the keys of one owner, or one record: they lie in one slot of
a cluster.
"""

from __future__ import annotations

ROOT = "penstock:router"
OWNERS = f"{ROOT}:owners"
"""A sorted set: routers by the time, in milliseconds, when they last said that they live."""

TAKE = """
local replaced = {}
for at, kind in ipairs({'string', 'string', 'hash', 'stream'}) do
  local found = redis.call('TYPE', KEYS[at]).ok
  if found ~= 'none' and found ~= kind then
    redis.call('DEL', KEYS[at])
    table.insert(replaced, KEYS[at] .. ' was a ' .. found)
  end
end
if not tonumber(redis.call('GET', KEYS[1]) or '0') then
  redis.call('DEL', KEYS[1])
  table.insert(replaced, KEYS[1] .. ' was no number')
end
local epoch = redis.call('INCR', KEYS[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('SET', KEYS[2], epoch, 'PX', ARGV[1])
redis.call('DEL', KEYS[3])
for at = 3, #ARGV, 2 do redis.call('HSET', KEYS[3], ARGV[at], ARGV[at + 1]) end
redis.call('PEXPIRE', KEYS[3], ARGV[1])
return {epoch, replaced}
"""
"""Begins an epoch of an owner: KEYS epoch, lease, bookings, log; ARGV milliseconds of the lease and of what is kept,
then number and bytes of each booking. What there was under the owner's name is over at once."""

WRITE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
local at = 7
for _ = 1, tonumber(ARGV[6]) do
  redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 1])
  at = at + 2
end
while at <= #ARGV do
  redis.call('HDEL', KEYS[2], ARGV[at])
  at = at + 1
end
redis.call('PEXPIRE', KEYS[2], ARGV[2])
if ARGV[5] ~= '' then
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', 1000, '*', 'e', ARGV[1], 'n', ARGV[4], 'd', ARGV[5])
  redis.call('PEXPIRE', KEYS[3], ARGV[3])
end
return 1
"""
"""Writes as the owner of an epoch, and renews its lease: KEYS lease, bookings, log; ARGV epoch, milliseconds of the
lease and of what is kept, the entry's number and bytes (empty: no entry), how many bookings are set, number and bytes
of each, then the numbers of those that are over. Returns 0, and changes nothing, when the lease is another's or has
expired."""

SNAPSHOT = """
local last = redis.call('XREVRANGE', KEYS[3], '+', '-', 'COUNT', 1)
return {redis.call('GET', KEYS[1]) or '', redis.call('HGETALL', KEYS[2]), last[1] or {}}
"""
"""Everything of an owner at one moment: KEYS lease, bookings, log."""

PUT = """
local old = redis.pcall('GET', KEYS[1])
if type(old) == 'string' and string.sub(old, 1, 5) == string.sub(ARGV[1], 1, 5) then
  local stamp = string.sub(old, 6, 18)
  if stamp > string.sub(ARGV[1], 6, 18) and stamp < ARGV[3] then return 0 end
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
"""Writes a record unless there is a newer one: KEYS its key; ARGV its bytes, the milliseconds that it is kept, and the
time from which no stamp can be."""


NOTE = """
local found = redis.call('TYPE', KEYS[1]).ok
if found ~= 'none' and found ~= 'zset' then redis.call('DEL', KEYS[1]) end
for at = 5, #ARGV do redis.call('ZADD', KEYS[1], ARGV[1], ARGV[at]) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[1] - ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
local over = math.min(redis.call('ZCARD', KEYS[1]) - ARGV[3], tonumber(ARGV[4]))
if over <= 0 then return {} end
local gone = redis.call('ZRANGE', KEYS[1], 0, over - 1)
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, over - 1)
return gone
"""
"""Notes which records of one kind were written: KEYS the list of that kind; ARGV the time in milliseconds, those that a
record is kept, most records, most that are named at once, then the names. Returns the names of the records that are too
many, those longest unwritten first, which the list has no more: the caller deletes them. They lie in other slots."""


def recent_key(kind: str) -> str:
    """The list of the records of one kind: a sorted set of their names by the time when each was last written."""
    return f"{ROOT}:recent:{kind}"


def owner_keys(owner: str) -> tuple[str, str, str, str]:
    """Epoch, lease, bookings and log of an owner."""
    root = f"{ROOT}:{{{owner}}}"
    return f"{root}:epoch", f"{root}:lease", f"{root}:bookings", f"{root}:log"
