-- Limits, in MessagePack: how many, how many of them are the tenant's own, the key's name, then columns: field, letter of
-- what is counted, window, scale, amount, capacity (scaled). The tenant's own limits stand first, then the key's, then those
-- of other scopes, of which there follow, each: the key of its levels, how many limits it has, and the life of its levels
-- (ms). A reservation keeps the first four columns, and last of all the row of the ledger in which its use is booked.
-- Letters: r requests, i input, o output, t tokens, c concurrent requests; m is money, in billionths, and its prices of a
-- token follow: m<input>,<cached input>,<output>, and ,<reasoning> if that is another than of output.
local SPEC = 3

-- The scopes of a spec with this many columns: the tenant's first, then the key's if it has limits, then the others. The
-- levels of one that `is_shared` by tenants are in its own state, a hash such as a tenant's.
local function scopes_of(spec, columns, tenant, life)
  local n, own, key = unpack(spec, 1, SPEC)
  local found, last = {{key = tenant, first = 1, last = own, life = life}}, own
  local others, rest = SPEC + columns * n + 1, n
  for i = others, #spec - 2, 3 do rest = rest - spec[i + 1] end
  if rest > own then
    found[2], last = {key = tenant .. ':key:' .. key, first = own + 1, last = rest, life = life}, rest
  end
  for i = others, #spec - 2, 3 do
    local name, count = spec[i], spec[i + 1]
    found[#found + 1] = {key = name, first = last + 1, last = last + count, life = spec[i + 2], is_shared = name:sub(1, #tenant) ~= tenant}
    last = last + count
  end
  return found
end

local function row_of(spec) return spec[#spec] end -- of a reservation's use

-- How much a limit of this letter counts of requests r and c, tokens i, o and t, the cached part of i, and the parts of o
-- that are reasoning, or open: they may be, so that they count at the higher of the two prices.
local function counted(amounts, letter)
  local found = amounts[letter]
  if found then return found end
  local input, cached, output, reasoning = letter:match('^m(%d+),(%d+),(%d+),?(%d*)$')
  local more = (tonumber(reasoning) or output) - output
  local part = more * amounts.reasoning + max(more, 0) * amounts.open
  return input * (amounts.i - amounts.cached) + cached * amounts.cached + output * amounts.o + part
end
