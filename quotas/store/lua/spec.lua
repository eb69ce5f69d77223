-- Limits, in MessagePack: how many, how many of them are the tenant's own, the key's name, then columns: field, letter of
-- what is counted, window, scale, amount, capacity (scaled); a reservation keeps the first four. The tenant's own limits
-- stand first.
local SPEC = 3
