//! Content format of a chat template: a list of parts, or a string.
//!
//! Uses vLLM's heuristic: parts if the template loops over the content of a message outside a loop over `messages`,
//! else a string. vLLM walks the syntax tree of the template; this parser reads its tags, with equal results for
//! templates in use. [`chat`](super::chat) converts the content.

/// Content format expected by a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContentFormat {
    /// One string; several texts are joined by newlines.
    Text,
    /// A list of `{"type": "text", "text": ...}`.
    Parts,
}

impl ContentFormat {
    /// Detects the format of `template`.
    pub(super) fn of(template: &str) -> Self {
        let tags: Vec<Tag<'_>> = tags(template).collect();
        // Aliases of the message list, then of one message; a name may be assigned from one that is defined later.
        let mut lists = vec!["messages"];
        let mut known = 0;
        while known < lists.len() {
            let list = lists[known];
            known += 1;
            for tag in &tags {
                if let Tag::Set { name, value } = tag
                    && base(value) == list
                    && !lists.contains(name)
                {
                    lists.push(name);
                }
            }
        }
        let loops =
            || tags.iter().filter_map(|tag| if let Tag::For { name, over } = tag { Some((name, over)) } else { None });
        let messages: Vec<&str> =
            loops().filter(|(_, over)| lists.contains(&base(over))).map(|(name, _)| *name).collect();
        let is_content = |over: &str| {
            let over = base(over);
            messages.iter().any(|name| {
                over.strip_prefix(name)
                    .is_some_and(|rest| matches!(rest.trim(), ".content" | "['content']" | "[\"content\"]"))
            })
        };
        if loops().any(|(_, over)| is_content(over)) { Self::Parts } else { Self::Text }
    }
}

enum Tag<'t> {
    For { name: &'t str, over: &'t str },
    Set { name: &'t str, value: &'t str },
}

/// The loops and assignments of a template.
fn tags(template: &str) -> impl Iterator<Item = Tag<'_>> {
    template.split("{%").skip(1).filter_map(|rest| {
        let (inside, _) = rest.split_once("%}")?;
        let inside = inside.trim_matches(['-', '+']).trim();
        let (word, rest) = inside.split_once(char::is_whitespace)?;
        match word {
            "for" => rest.split_once(" in ").map(|(name, over)| Tag::For { name: name.trim(), over }),
            "set" => rest.split_once('=').map(|(name, value)| Tag::Set { name: name.trim(), value }),
            _ => None,
        }
    })
}

/// Base variable of an expression, without loop condition, filters and slices.
fn base(expression: &str) -> &str {
    let expression = expression.split(" if ").next().unwrap_or_default();
    let expression = expression.split(" recursive").next().unwrap_or_default();
    let expression = expression.split('|').next().unwrap_or_default().trim();
    match expression.rsplit_once('[') {
        Some((before, slice)) if slice.ends_with(']') && slice.contains(':') => before.trim(),
        _ => expression,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loops_over_content_select_parts() {
        let parts = [
            "{% for m in messages %}{% for c in m['content'] %}{{ c.text }}{% endfor %}{% endfor %}",
            "{%- for m in messages -%}{%- for c in m.content | selectattr('type', 'equalto', 'text') -%}{%- endfor -%}{%- endfor -%}",
            "{% set loop_messages = messages[1:] %}{% for m in loop_messages %}{% for c in m[\"content\"] if c %}{% endfor %}{% endfor %}",
        ];
        for template in parts {
            assert_eq!(ContentFormat::of(template), ContentFormat::Parts, "{template}");
        }
        let text = [
            "{% for m in messages %}{{ m['content'] }}{% endfor %}",
            "{% for m in messages %}{% for t in m.tool_calls %}{% endfor %}{% endfor %}",
            "{% for t in tools %}{% for c in t.content %}{% endfor %}{% endfor %}",
            "no tags, or broken ones {% for",
        ];
        for template in text {
            assert_eq!(ContentFormat::of(template), ContentFormat::Text, "{template}");
        }
    }
}
