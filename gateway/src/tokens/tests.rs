//! Checks of chat templates that hold for any bytes.

use axum::body::Bytes;

use super::chat::{MediaForm, PROMPT_BYTES_MAX};
use super::template::{TemplateSources, Templates};
use crate::formats::openai::ChatParts;

/// Templates of usual forms. Input with another first byte has its own template.
const TEMPLATES: [&str; 3] = [
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}",
    "{%- for m in messages -%}{%- for c in m.content -%}{{ c.text | trim }}{%- endfor -%}{{ m.tool_calls | tojson }}{%- endfor -%}",
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = ns.s + m.content %}\
     {% endif %}{% endfor %}{{ bos_token }}{{ ns.s }}{{ messages[1:] | length }}{{ tools | tojson(indent=2) }}",
];

/// Template and messages, separated by a zero byte; or the number of a template above and messages.
///
/// Output stays within its limit, and equal inputs give equal results.
pub(crate) fn chat_templates(bytes: &[u8]) {
    let Some((&selector, rest)) = bytes.split_first() else { return };
    let (template, messages) = match TEMPLATES.get(usize::from(selector)) {
        Some(template) => ((*template).to_owned(), rest),
        None => {
            let mut parts = rest.splitn(2, |byte| *byte == 0);
            let template = String::from_utf8_lossy(parts.next().unwrap_or_default()).into_owned();
            (template, parts.next().unwrap_or_default())
        }
    };
    let sources = TemplateSources { default: Some(template), ..TemplateSources::default() };
    let Ok(templates) = Templates::compile(sources, || 1_721_995_200) else { return };
    for continued in [false, true] {
        let parts = ChatParts {
            messages: Bytes::copy_from_slice(messages),
            tools: Some(Bytes::from_static(br#"[{"type":"function","function":{"name":"f"}}]"#)),
            add_generation_prompt: Some(!continued),
            continue_final_message: Some(continued),
            ..ChatParts::default()
        };
        for media in [MediaForm::Rejected, MediaForm::Accepted(Some("<image>"))] {
            let rendered = templates.render(&parts, media);
            assert!(rendered.as_ref().map_or(0, String::len) <= PROMPT_BYTES_MAX, "longer than the limit");
            let again = templates.render(&parts, media);
            assert_eq!(rendered.ok(), again.ok(), "a second rendering differs");
        }
    }
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let messages = [
        r#"[{"role":"system","content":"s"},{"role":"user","content":"x"}]"#,
        r#"[{"role":"user","content":[{"type":"text","text":"x"},{"type":"image_url"}]},{"role":"assistant","content":null,"tool_calls":[{"function":{"name":"f","arguments":"{\"a\": 1}"}}]}]"#,
    ];
    let own = |template: &str| [&[255][..], template.as_bytes(), &[0], messages[0].as_bytes()].concat();
    let fixed = (0_u8..3).flat_map(|n| messages.map(|messages| [&[n][..], messages.as_bytes()].concat()));
    fixed
        .chain(TEMPLATES.map(own))
        .chain([
            own("{% macro f(x) %}{{ x.title() }}{% endmacro %}{{ f(messages[0].content) * 3 }}{{ strftime_now('%d %b') }}"),
            own("{{ raise_exception('no') }}{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ loop.index0 }}{% endfor %}"),
        ])
        .collect()
}
