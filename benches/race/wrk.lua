-- Chats of 140 words with one of eight system prompts, for requests with one short answer.
math.randomseed(7)
wrk.method = "POST"
wrk.headers["content-type"] = "application/json"
local function words(count)
    local all = {}
    for at = 1, count do
        local n, letters = math.random(0, 4095), " "
        for _ = 1, 4 do n, letters = math.floor(n / 26), letters .. string.char(97 + n % 26) end
        all[at] = letters
    end
    return table.concat(all)
end
local systems, bodies, sent = {}, {}, 0
for at = 1, 8 do systems[at] = words(100) end
for at = 1, 400 do
    bodies[at] = '{"model":"mock","messages":[{"role":"system","content":"' .. systems[at % 8 + 1]
        .. '"},{"role":"user","content":"' .. words(40) .. '"}],"max_tokens":1}'
end
request = function()
    sent = sent + 1
    return wrk.format(nil, "/v1/chat/completions", nil, bodies[sent % 400 + 1])
end
